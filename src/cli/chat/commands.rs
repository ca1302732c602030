//! The /commands of a chat.

use super::conversation::Conversation;

/// What a line of input turned out to be.
pub(crate) enum Outcome {
    /// Not a command: something to ask the model.
    Question,
    /// Done; this is to be said about it.
    Say(String),
    /// Leave the program.
    Quit,
}

const HELP: &str = "\
/help            this list
/clear           forget the conversation
/system TEXT     instructions for the model from now on; without TEXT, none
/temp X          temperature; 0 is greedy
/tokens N        tokens of an answer at most; without N, up to the context's end
/save FILE       write the conversation as Markdown
/quit            leave (also Ctrl-D)
A \\ at the end of a line continues the message on the next.";

/// Runs `line` if it is a command.
pub(crate) fn run(line: &str, conversation: &mut Conversation) -> Outcome {
    if !line.starts_with('/') {
        return Outcome::Question;
    }
    let (name, argument) = line.split_once(char::is_whitespace).map_or((line, ""), |(name, rest)| (name, rest.trim()));
    let said = match name {
        "/help" | "/?" => HELP.into(),
        "/quit" | "/exit" | "/bye" => return Outcome::Quit,
        "/clear" => {
            conversation.clear();
            "forgotten".into()
        }
        "/system" => {
            conversation.system = Some(argument.to_string()).filter(|text| !text.is_empty());
            if argument.is_empty() { "no instructions".into() } else { "instructions set".into() }
        }
        "/temp" => match argument.parse::<f32>() {
            Ok(temperature) if (0.0..=100.0).contains(&temperature) => {
                conversation.sampling.temperature = temperature;
                format!("temperature {temperature}")
            }
            _ => "give a temperature from 0, as in /temp 0.7".into(),
        },
        "/tokens" if argument.is_empty() => {
            conversation.max_tokens = None;
            "answers go up to the context's end".into()
        }
        "/tokens" => match argument.parse() {
            Ok(n) if n > 0 => {
                conversation.max_tokens = Some(n);
                format!("answers have at most {n} tokens")
            }
            _ => "give a number of tokens, as in /tokens 500".into(),
        },
        "/save" if argument.is_empty() => "give a file, as in /save talk.md".into(),
        "/save" => match std::fs::write(argument, conversation.transcript()) {
            Ok(()) => format!("saved to {argument}"),
            Err(e) => format!("cannot write {argument}: {e}"),
        },
        other => format!("there is no command {other}; /help lists them"),
    };
    Outcome::Say(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(line: &str, conversation: &mut Conversation) -> String {
        match run(line, conversation) {
            Outcome::Say(text) => text,
            Outcome::Question => "QUESTION".into(),
            Outcome::Quit => "QUIT".into(),
        }
    }

    #[test]
    fn commands_change_what_they_name() {
        let mut conversation = Conversation::new(None, Default::default(), None);
        assert_eq!(say("What is 2+2?", &mut conversation), "QUESTION");
        assert_eq!(say("/quit", &mut conversation), "QUIT");
        assert!(say("/nonsense x", &mut conversation).contains("/nonsense"));
        say("/system be brief", &mut conversation);
        assert_eq!(conversation.system.as_deref(), Some("be brief"));
        say("/system", &mut conversation);
        assert_eq!(conversation.system, None);
        say("/temp 0.5", &mut conversation);
        for bad in ["/temp", "/temp -1", "/temp NaN", "/temp inf"] {
            assert!(say(bad, &mut conversation).contains("as in"), "{bad}");
        }
        assert_eq!(conversation.sampling.temperature, 0.5);
        say("/tokens 12", &mut conversation);
        assert!(say("/tokens 0", &mut conversation).contains("as in"));
        assert_eq!(conversation.max_tokens, Some(12));
    }

    #[test]
    fn a_conversation_is_saved_and_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk.md");
        let mut conversation = Conversation::new(Some("s".into()), Default::default(), None);
        conversation.ask("q".into());
        conversation.answered("a".into());
        say(&format!("/save {}", path.display()), &mut conversation);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "**system**\n\ns\n\n**user**\n\nq\n\n**assistant**\n\na\n");
        say("/clear", &mut conversation);
        assert_eq!(conversation.transcript(), "**system**\n\ns\n");
        assert!(say("/save /no/such/dir/x", &mut conversation).starts_with("cannot write"));
    }
}
