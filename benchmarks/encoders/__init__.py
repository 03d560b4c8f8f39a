"""What do encoders bring to streams of text beside requests with images, and what do they cost?"""
