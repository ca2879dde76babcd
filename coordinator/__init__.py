"""The coordinator daemon: tokenizer, queue, batching and layer plan. It touches no tensor."""
