"""The two files a user writes, as frozen records, read once and passed down.

`agreement` is `peers.yaml`, the same at every site; `site` is `node.yaml`, one hospital's own.
Both consist of the same `fields`, and `validation` says what is wrong with them, and where.
"""
