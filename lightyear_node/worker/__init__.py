"""The worker: a child process that holds the site's model and data, and the parent's grip on it.

`handle` and `jobs` belong to the daemon and never import torch; everything else runs in the child
and never imports the network.
"""
