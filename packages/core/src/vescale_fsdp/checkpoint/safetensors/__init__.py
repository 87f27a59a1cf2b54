"""safetensors: the format, which rank writes what, `save_safetensors` and `load_safetensors`."""
