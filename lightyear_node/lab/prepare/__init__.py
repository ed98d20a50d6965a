"""Makes the prepared data sets from their public sources: `python -m lightyear_node.lab.prepare`.

Each module reads the files of a source as they are published, from a folder, and returns the arrays
of the files that the built-in tasks read.  docs/data.md has origins, licences and layouts.

Modules:

    arrays   what they share: splits by group, reading images, JPEG files in one array
    femnist  LEAF's JSON files
    heart    UCI's four files
    hc18     images and outlines of the HC18 challenge
    isic     ISIC 2019 with FLamby's centres
    pcam     patches of the Histopathologic Cancer Detection challenge
    retina   DRIVE, STARE and CHASE_DB1
"""
