"""What coordinator, stage and client share: errors, settings, logs, RPC plumbing, frames, GGUF. No torch."""
