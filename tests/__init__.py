"""The proof of the project; the folders mirror the packages."""
