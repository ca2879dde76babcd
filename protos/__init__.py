"""The wire contract: *.proto (package pipellm.v1) and the code generated from them (`make protos`)."""
