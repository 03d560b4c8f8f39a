"""What turns will take: profiles of engines, corrected by what turns measure; sessions that will return."""
