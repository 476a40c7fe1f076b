"""The Llama-family decoder: configuration, weights, tokenizer, heads."""
