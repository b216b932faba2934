"""TRL's own trainer on the instrument: simulated without its weights, tracked with its phases."""
