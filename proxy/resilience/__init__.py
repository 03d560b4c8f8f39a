"""What follows when something fails: the table of it, who is passed over, what is tried again, what is wound up."""
