//! The /commands of a chat.

use super::conversation::ChatHistory;

/// What to do about a line of input.
pub(crate) enum Outcome {
    /// It is no command: ask the model.
    Question,
    /// It was a command: print this.
    Print(String),
    /// End the program.
    Quit,
}

const HELP: &str = "\
/help            list the commands
/clear           clear the conversation
/system TEXT     set the system prompt; without TEXT, remove it
/temp X          set the temperature; 0 is greedy
/tokens N        limit answers to N tokens; without N, to the end of the context
/save FILE       save the conversation as Markdown
/quit            quit (also Ctrl-D)
A \\ at the end of a line continues the message on the next line.";

/// Runs `line` if it is a command.
pub(crate) fn run(line: &str, conversation: &mut ChatHistory) -> Outcome {
    if !line.starts_with('/') {
        return Outcome::Question;
    }
    let (name, argument) = line.split_once(char::is_whitespace).map_or((line, ""), |(name, rest)| (name, rest.trim()));
    let text = match name {
        "/help" | "/?" => HELP.into(),
        "/quit" | "/exit" | "/bye" => return Outcome::Quit,
        "/clear" => {
            conversation.clear();
            "conversation cleared".into()
        }
        "/system" => {
            conversation.system = Some(argument.to_string()).filter(|text| !text.is_empty());
            if argument.is_empty() { "system prompt removed".into() } else { "system prompt set".into() }
        }
        "/temp" => match argument.parse::<f32>() {
            Ok(temperature) if (0.0..=100.0).contains(&temperature) => {
                conversation.sampling.temperature = temperature;
                format!("temperature {temperature}")
            }
            _ => "give a temperature from 0 to 100, as in /temp 0.7".into(),
        },
        "/tokens" if argument.is_empty() => {
            conversation.max_tokens = None;
            "answers may be as long as the context allows".into()
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
        other => format!("unknown command {other}; /help lists the commands"),
    };
    Outcome::Print(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(line: &str, conversation: &mut ChatHistory) -> String {
        match run(line, conversation) {
            Outcome::Print(text) => text,
            Outcome::Question => "QUESTION".into(),
            Outcome::Quit => "QUIT".into(),
        }
    }

    #[test]
    fn commands_change_what_they_name() {
        let mut conversation = ChatHistory::new(None, Default::default(), None);
        assert_eq!(output("What is 2+2?", &mut conversation), "QUESTION");
        assert_eq!(output("/quit", &mut conversation), "QUIT");
        assert!(output("/nonsense x", &mut conversation).contains("/nonsense"));
        output("/system be brief", &mut conversation);
        assert_eq!(conversation.system.as_deref(), Some("be brief"));
        output("/system", &mut conversation);
        assert_eq!(conversation.system, None);
        output("/temp 0.5", &mut conversation);
        for bad in ["/temp", "/temp -1", "/temp NaN", "/temp inf"] {
            assert!(output(bad, &mut conversation).contains("as in"), "{bad}");
        }
        assert_eq!(conversation.sampling.temperature, 0.5);
        output("/tokens 12", &mut conversation);
        assert!(output("/tokens 0", &mut conversation).contains("as in"));
        assert_eq!(conversation.max_tokens, Some(12));
    }

    #[test]
    fn a_conversation_is_saved_and_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk.md");
        let mut conversation = ChatHistory::new(Some("s".into()), Default::default(), None);
        conversation.ask("q".into());
        conversation.answered("a".into());
        output(&format!("/save {}", path.display()), &mut conversation);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "**system**\n\ns\n\n**user**\n\nq\n\n**assistant**\n\na\n");
        output("/clear", &mut conversation);
        assert_eq!(conversation.transcript(), "**system**\n\ns\n");
        assert!(output("/save /no/such/dir/x", &mut conversation).starts_with("cannot write"));
    }
}
