"""The two configuration files as frozen records, read once and passed down.

Modules:

    federation   `peers.yaml`, the federation config: the same at every site
    node         `node.yaml`, one site's own settings; environment and flags
    fields       value types: names, addresses, durations, sizes
    strict_yaml  reads YAML; errors name file, line and the nearest valid key
    validation   plain values to frozen records, or an error about the first wrong one
"""
