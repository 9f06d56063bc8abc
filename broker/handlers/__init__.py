"""The hot routes: publish and poll, answered the same through both doors."""
