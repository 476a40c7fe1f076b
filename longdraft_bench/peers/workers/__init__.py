"""One small program per engine that `longdraft bench peers` measures; `serve.py` runs them.

Except for `with_longdraft` they do not import longdraft, so that the Python interpreter of another environment can run
them.
"""
