"""From a model's name to the last token of a text.

    loading.py         reads a model and its drafting parts from files  ->  LoadedModel
    loaded_model.py    the inputs of every request: a loaded model and the choice of a drafter
    engine.py          LoadedModel + DrafterChoice                      ->  Engine, the public API
    settings.py        the options of loading and journals, for the commands and the server
    generation.py      LoadedModel + DrafterChoice + prompt + settings  ->  Generation, one request
    batching.py        several generations that share their forwards
    rewind.py          the cut of a text before a banned phrase
    thinking.py        what follows the rules of a thought, and its close on request
    provenance.py      the record of a text's origin in its journal, and the check that the text can be resumed
    run_statistics.py  the statistics of a run
    huggingface.py     engines for loaded models of `transformers`
"""
