"""What a run will need before anything is started: parameters, memory per GPU, FLOPs, days."""
