"""Model files: the GGUF reader, the tokenizer and the chat template a file carries. No torch."""
