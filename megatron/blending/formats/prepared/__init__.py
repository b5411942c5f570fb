"""Prepared folders: tar shards with index files, as energon and `python -m megatron.blending
prepare` write them.

    data/shard_0.tar, shard_1.tar           tar      samples: members with the same stem
    data/shard_0.tar.idx                    shard    offsets of the samples in the archive
    data/.nv-meta/.info.json, split.yaml,   nv_meta  shards, splits, kind of sample
                  dataset.yaml
    data/.nv-meta/index.sqlite              sample_index   key -> shard and sample
"""
