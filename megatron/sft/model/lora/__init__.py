"""LoRA: adapters beside megatron-core's parallel layers, their names in PEFT's files, and those
files.
"""
