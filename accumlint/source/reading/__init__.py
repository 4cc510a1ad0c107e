"""Finding files, sieving and parsing them."""
