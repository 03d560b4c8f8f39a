"""Soak: do conversations get the right texts, and is nothing leaked, while workers fail, leave and come back?"""
