//! What this machine can do: asked of it, not guessed from its version.
