"""From the files of a model to its configuration, its tensors and its transformer.

    hub.py, inventory.py       from a name to a folder or a GGUF file; the models on this machine
    config_file.py             config.json or GGUF metadata  ->  ModelConfig
    defaults.py                a model's own sampling settings
    tensor_files.py            the tensors of a folder or of a GGUF file, under one interface
      tensor_file.py             safetensors
      torch_file.py              pytorch_model.bin, read without running code (torch_pickle.py)
      packed_tensors.py          matrices of 4 or 8 bits in safetensors (packed_format.py)
      gguf/                      GGUF
      gpt_oss.py                 gpt-oss's experts
      state_dict.py              tensors in memory
    tensor_names.py            the names and shapes of a checkpoint's tensors
    checkpoint.py              tensors, packed for the kernels  ->  Transformer
    packed_file.py, quantized_cache.py, fingerprint.py  the cache of quantised weights, and its key
    sizing.py, memory.py       memory of a model; memory of its reading
"""
