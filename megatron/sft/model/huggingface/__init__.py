"""Reads a HuggingFace folder into options and parameters of the model, and writes one, in any
parallel layout.

    config.json      config_file (reads it), config (its options), families (differences of each
                     `model_type` from Llama)
    *.safetensors    files (which of them count), headers, names (spellings of tensors), folder
                     (all of it), quantized (codes and scales as values), rows and weights (which
                     tensors make up which parameter), read, write, gather
    other files      companions
"""
