"""How a conversion is proven to compute what the reference computes."""
