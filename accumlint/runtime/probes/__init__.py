"""What is hooked in a rank, one module a part of torch. Each has `install(recorder, patches)`."""
