"""One decoding step as one launch: what a token needs at fixed addresses, captured and replayed."""
