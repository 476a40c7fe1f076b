"""Other engines beside longdraft, each in a process of its own: `longdraft bench peers`.

    process       an engine's process, its variants, and the interpreter that runs it
    steps         steps of plain decoding, and prompts
    texts         whole texts by the engines' own generation
    perplexity    perplexity of a text, with the same GGUF files
    workers/      one small program for each engine
"""
