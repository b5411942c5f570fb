"""From records in files to one resumable stream. Knows no tokens, no torch.distributed.

sources   open_source(path): random access to the records of a JSONL, JSON or Parquet file
order     permute_index(index, size, seed, epoch): which record is read when, computed and never stored
"""
