"""Sources with weights (`sources`, `token_weights`), worker processes (`worker_pool`, `worker`,
`messages`) and the loader of chunks (`chunk_loader`).
"""
