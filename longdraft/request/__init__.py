"""The plain data of a request, which imports nothing of the package but its errors.

    settings.py         what a setting is: name, type, range, default, help, other names
    sampling_params.py  how each token is chosen and when the text stops
    structured.py       what a structured output must match
    tools.py            the functions that an answer may call
    context.py          the text so far
    tree.py             a draft: a tree of tokens
    events.py           what each step adds to the text, and how the text ends
    loops.py            the detection of a text that repeats itself
    openai_body.py      parameters of OpenAI's request bodies that are not supported
"""
