"""Between a client's connection and the app: what a client may ask for, how long it may take, and how it ends."""
