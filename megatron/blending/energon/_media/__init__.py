"""Images, video and audio. What reads text imports none of it."""
