"""Text and tokens.

    tokenizer.py, pieces.py  text to token ids and back
    gguf_vocabulary.py, sentencepiece.py, sentencepiece_file.py  tokenizers from other files than tokenizer.json
    tokenizer_config.py  special and added tokens in the small files beside a tokenizer
    chat_template.py, rendering.py  from messages to a prompt
    thinking.py, harmony.py  the thinking and the answer in what a model writes
    stream.py           the text of new tokens, where it ends, and where its special tokens are
    banned_phrases.py   phrases that a text must not contain
"""
