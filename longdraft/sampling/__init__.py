"""From logits to tokens: filters, keyed noise, the penalty window, and three samplers that choose the same tokens."""
