"""Calls of tools, in the form that each family of models was trained on.

    model_tools.py  all of it for one model: prompts, settings and readers of its chats
    forms.py        the forms, which one a model has, and messages as its chat template expects them
    grammar.py      the grammar of an answer with calls: nothing else can be written
    reader.py       the answer as it is written: thinking, text, and calls with their arguments as JSON

The grammar allows exactly the spelling that the chat template gives a call in the next prompt, where JSON decides it.
So the next prompt begins with the tokens that were written, and its rows are in the prefix tree.
"""
