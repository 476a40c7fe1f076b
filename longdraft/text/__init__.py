"""Text and tokens.

    tokenizer.py        text to token ids and back
    gguf_vocabulary.py, sentencepiece.py, sentencepiece_file.py  tokenizers from other files than tokenizer.json
    chat_template.py    from messages to a prompt
    thinking.py, harmony.py  the thinking and the answer in what a model writes
    stream.py           the text of new tokens, and where it ends
    banned_phrases.py   phrases that a text must not contain
"""
