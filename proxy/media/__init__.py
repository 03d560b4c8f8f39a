"""Images, sounds and videos in a request's messages: found, checked, named by tenant and content, and replaced."""
