"""What the record of a run says: a page of pictures, flags, a comparison of two runs, and a live view."""
