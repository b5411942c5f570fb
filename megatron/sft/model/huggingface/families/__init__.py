"""HuggingFace families (`model_type`), one small file each.

`family` has the fields of a family, `registry` the list of all. `config_fields`, `mixture` and
`fused` have what several families share. The folder has more files than others on purpose: whoever
adds or corrects a family reads one file of 20 to 130 lines, and no other.
"""
