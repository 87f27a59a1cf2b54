"""What lies on disk: JSON, boxes of elements, the manifest, files, the seal."""
