"""Recognition: is this sink a site we can fuse? Nothing here changes a graph."""
