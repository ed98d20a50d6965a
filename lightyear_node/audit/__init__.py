"""What a site's record says, and whether it still says what was written.

`verify` follows hashes and signatures to the first record that does not hold; `export` writes a
copy that can be verified alone; `compare` lays two sites' records of the same rounds side by side;
`rounds` and `reasons` tell people what happened.  Everything is read only, of a node that runs or
of one that does not; nothing here knows the network.
"""
