"""Numbers about overlap: figures, timelines and their pictures. Computes and draws; never launches."""
