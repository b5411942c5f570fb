"""Ready subjects: models of transformers and megatron-core, trainers, scripts with the plug-in; and
the small models, weights and collators that they are examined with.
"""
