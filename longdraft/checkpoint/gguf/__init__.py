"""Models in GGUF, the format of llama.cpp, Ollama and LM Studio, read without their libraries."""
