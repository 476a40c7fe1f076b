"""The model: configuration, weights, the transformer, tokenizer, chat templates, heads and glide layers."""
