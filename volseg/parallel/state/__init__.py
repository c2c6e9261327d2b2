"""What a network is besides its inputs: noted, compared, put back."""
