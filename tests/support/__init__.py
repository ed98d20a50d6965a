"""What tests of several folders share: sites, journals, terminals, peers that misbehave."""
