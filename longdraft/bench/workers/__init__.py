"""One small program for each engine that `longdraft bench peers` measures; `serve.py` runs them.

They import nothing of longdraft (but `with_longdraft`), so that another interpreter can run them.
"""
