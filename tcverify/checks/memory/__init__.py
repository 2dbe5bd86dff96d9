"""Which values share memory, how long they live, and the checks of peak memory and of communication buffers."""
