"""Images of chats in a run: from a record's image to the input of the language model.

    source       an image of a record: its bytes, its size by the header, its pixels
    urls         images of URLs, fetched once into a folder
    vision       what a model's folder says of images: sizes, special tokens, the tower
    sizes        size of an image -> patches, tokens and FLOPs
    positions    positions of a sequence's tokens along time, height and width
    rotary       rotary embedding of such positions
    tower        transformers' own vision tower, on a list of images
    deepstack    features of the tower that are added behind the first layers
    model        the tower in a GPTModel: builds it, reads and writes its weights, merges its rows

Placeholders of images are put into chats by `megatron.sft.data.image_chats`.
"""
