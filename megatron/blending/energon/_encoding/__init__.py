"""Samples of a task: how records become samples, and samples become batches.

source_entries   opens the sources of a metadataset, each with a load
loads            load: function from a record to a sample
cooking          cookers: functions of the user from a crude sample to a sample
decode           parts of a sample to values: text, JSON, arrays, images
samples          sample and batch classes; fields: converts between them; collate: stacks them
task_encoder     the user's class: encodes, packs, batches; default_encoder: with types
join, file_store, factories, source_info   joined sources, side stores, energon's classes of
                                           folders, the origin of a sample
"""
